"""Plain tensors in, plain tensors out: what a decode step computes over pages."""
