"""FlexiCache (arXiv 2511.00868) as a drop-in key-value cache for Hugging Face transformers."""
