"""To and from other libraries: any `nn.Module`, Hugging Face folders, and files of Accelerate."""
