"""Write sizes of memory and of disks for the terminal, for logs and for errors."""

GB, GIB = 10**9, 1 << 30


def gb(n_bytes: float, digits: int = 1) -> str:
    """Write bytes in decimal gigabytes, as card and disk makers do.

    >>> gb(24e9), gb(1_234_000_000, 2)
    ('24.0 GB', '1.23 GB')
    """
    return f"{n_bytes / GB:.{digits}f} GB"


def gib(n_bytes: float, digits: int = 1) -> str:
    """Write bytes in binary gigabytes, as allocators count.

    >>> gib(3 << 29)
    '1.5 GiB'
    """
    return f"{n_bytes / GIB:.{digits}f} GiB"
