"""What the workers of one machine share without overlap: devices, CPU cores, memory for KV."""
