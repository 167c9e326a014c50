"""What a transformers config says about its KV heads, and the embedded model."""
