"""Accuracy-retention harness: tasks, metrics, methods, a runner and a report."""
