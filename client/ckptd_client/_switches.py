"""Guards that a test can switch off to prove that it would notice (the tear test). Never touched otherwise."""

from __future__ import annotations

FENCE = True  # the optimizer's next step waits for the capture
SYNC_COPIES = True  # buffers, small and hand-written tensors are copied before snapshot() returns
VERSIONS = True  # what was written before the fence is known by its version counter
RESHARD = True  # FSDP2 modules go back to their shards before their tensors are looked up
