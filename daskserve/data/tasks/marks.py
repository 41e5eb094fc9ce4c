"""The attributes that the decorators for tasks set."""

from __future__ import annotations

#: Attribute of a class: the `daskserve.data.tasks.decorator.ConsumerSpec` of the queue that it consumes.
CONSUMER = "__daskserve_task_consumer__"
#: Attribute of a method: the name of the tasks that it runs.
HANDLER = "__daskserve_task_handler__"
