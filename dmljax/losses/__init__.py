"""x"""

import jax  # noqa: F401
