"""The verbs of the controller, which clients call remotely.

A verb that changes the instance takes the lock, calls a pure function of `daskserve.control.decisions`, and
commits the change.
"""
