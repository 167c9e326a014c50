"""The suites: `longbench`, `leval`, `ruler` and the user's own rows (`custom`)."""

from __future__ import annotations

from eval.tasks.base import Example, Prompt, Request, Task

__all__ = ["SUITES", "Example", "Prompt", "Request", "Task", "get_task", "task_names"]

SUITES = ("longbench", "leval", "ruler", "custom")


def get_task(suite: str, name: str) -> Task:
    """The task `name` of `suite`; for `custom`, `name` is a path, or `path:metric`.

    Raises:
        ValueError: unknown suite or task; the message lists the known ones.
    """
    if suite == "custom":
        from eval.tasks.custom import custom_task

        return custom_task(name)
    tasks = _tasks(suite)
    if name not in tasks:
        raise ValueError(f"no task {name!r} in {suite}; known: {', '.join(tasks)}")
    return tasks[name]


def task_names(suite: str) -> list[str]:
    """All task names of a suite, in the benchmark's order; LongBench-E's at the end."""
    return list(_tasks(suite))


def _tasks(suite: str) -> dict[str, Task]:
    if suite == "longbench":
        from eval.tasks.longbench import TASKS
    elif suite == "leval":
        from eval.tasks.leval import TASKS
    elif suite == "ruler":
        from eval.tasks.ruler import TASKS
    else:
        raise ValueError(f"suite is {suite!r}, expected one of {', '.join(SUITES)}")
    return TASKS
