"""To and from other libraries: any `nn.Module`, and Hugging Face folders."""
