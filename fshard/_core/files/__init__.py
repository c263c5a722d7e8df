"""Files that ranks read and write together: on disks or in storages of objects, of safetensors or of torch."""
