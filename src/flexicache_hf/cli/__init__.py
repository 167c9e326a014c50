"""The commands of `flexicache`."""
