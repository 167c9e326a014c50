"""Which KV heads are unstable: measured, learned, published or by rule."""
