"""An accelerator that is simulated *below* torch (design D16): a backend of its own (``device="sim"``), whose kernels are the
CPU's, run later and in each stream's order; what nothing orders is told as a race."""
