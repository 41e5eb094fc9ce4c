"""What daskserve uses of other libraries beyond their public API: one module per library.

Each module checks what it needs when it is imported, with `daskserve.internals.checking`, and gives it a
public name that says what it does. No other module touches private attributes of another library. The module
for ``distributed`` is `daskserve.cluster.distributed_internals`: only the cluster room imports that library.
"""
