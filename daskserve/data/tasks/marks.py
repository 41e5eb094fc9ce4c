"""The attributes that the decorators of tasks set."""

from __future__ import annotations

#: Of a class, with the `daskserve.data.tasks.decorator.ConsumerSpec` of the queue that it consumes.
CONSUMER = "__daskserve_task_consumer__"
#: Of a method, with the name of the tasks that it runs.
HANDLER = "__daskserve_task_handler__"
