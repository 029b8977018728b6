"""How the control plane grows with nodes, ranks and tensors (P16): ``python -m bench.scale``."""
