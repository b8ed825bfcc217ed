"""Where this plugin meets Megatron-LM: the only place that imports megatron."""
