"""Use: how the rewrite gets into a call of the model, into ``torch.compile`` and into Hugging Face's switches."""
