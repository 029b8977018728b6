"""How fast this node may send beside training: from the slow-down of its ranks' steps, or within the spans of a step in which
ranks do not communicate; and how fast bytes moved."""
