"""What a job's state is and where its bytes lie: boxes of logical tensors, the layout of a rank's slot, whose copy of a value
counts, which values ranks hold alike, who writes which slice to storage, and where each wanted slice comes from."""
