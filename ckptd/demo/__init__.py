"""The main job, on one machine: real training on four nodes that are then broken in five ways (``ckptd demo``)."""
