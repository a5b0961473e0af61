"""Starting Triton beside a package called cuda_utils."""

from __future__ import annotations

import sys


def start_triton() -> None:
    """Load Triton's CUDA driver, and keep the name cuda_utils for our own package.

    Triton builds an extension module that is called cuda_utils too and, being of the old single-phase kind,
    puts itself into sys.modules when it is loaded; after that `import cuda_utils.event` fails with "not a
    package". Triton itself keeps what it needs of it, so the name can be given back at once.
    Source: triton 3.6.0, backends/nvidia/driver.py, CudaUtils.
    """
    from triton.runtime import driver

    if not hasattr(sys.modules.get("cuda_utils"), "__path__"):
        sys.modules.pop("cuda_utils", None)  # Triton was first
    import cuda_utils

    driver.active.utils  # noqa: B018 (loads the extension module)
    sys.modules["cuda_utils"] = cuda_utils
