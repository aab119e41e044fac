"""The block merge of the online softmax, on GPUs: `kernel`, and `launch`, which prepares it."""
