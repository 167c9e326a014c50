"""Where the pages of a KV head live: on the device, or on the host with a working set."""
