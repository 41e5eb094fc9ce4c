"""The private parts of other libraries that daskserve uses: one module per library.

Each module checks its requirements when it is imported, with `daskserve.internals.checking`, and gives it a
public name that describes it. No other module touches private attributes of another library. The module for
``distributed`` is `daskserve.cluster.distributed_internals`: only `daskserve.cluster` imports that library.
"""
