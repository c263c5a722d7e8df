"""Adapters in the files of PEFT, read and written by slices.

cfg, adapters = fs.peft.load("my-adapters", params, of=gpt2.theirs)          # described, for a parameter tree
fs.peft.save("again", cfg, adapters, params, of=gpt2.theirs)                 # placed on any mesh, by every rank

apply, module = fs.defer(lambda: peft.get_peft_model(AutoModel.from_config(base), config))
module = fs.peft.weights("my-adapters", module, of=apply)                    # in a module that peft itself has wrapped
fs.peft.save_module("again", params, of=apply)
"""

from .adapters import load, save
from .wrapped import save_module, weights

__all__ = ["load", "save", "save_module", "weights"]
