"""Configuration files of Hugging Face Accelerate, read unchanged.

settings = fs.accelerate.read("fsdp_config.yaml")        # what the file says, each key translated or named
settings = fs.accelerate.settings()                      # under `python -m fshard launch --config_file`, or else None
mesh = fs.make_mesh(**settings.axes)                     # data=2
"""

from .settings import Settings, read, settings

__all__ = ["Settings", "read", "settings"]
