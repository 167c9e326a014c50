"""Page arithmetic: which pages there are, what describes them, which are due and which win."""
