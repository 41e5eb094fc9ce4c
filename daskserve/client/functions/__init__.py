"""The functions of ``import daskserve as serve``, in their blocking and awaitable forms."""
