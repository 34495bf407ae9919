"""The network: GPT and Llama families from one configuration, cut into pipeline stages."""
