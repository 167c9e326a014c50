"""Everything transformers calls: the layer, its attention function, masks and prompts."""
