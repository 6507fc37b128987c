"""The disaggregation decision: one worker, or a prefill and a decode worker."""
