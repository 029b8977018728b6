"""How snapshots outlive nodes: which policy fits the memory, who holds whose replicas or parity shards, what a snapshot
survives now, how far protection goes down without memory, and what a failure would cost."""
