"""To and from other libraries: Hugging Face folders, adapters of PEFT, files of Accelerate, state dicts."""
