"""User code of any form behind one interface: functions, classes and ASGI applications."""
