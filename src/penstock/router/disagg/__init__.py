"""Whether a prompt is computed where it is answered, or by a prefill worker; two sums of seconds decide."""
