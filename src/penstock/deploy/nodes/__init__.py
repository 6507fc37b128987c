"""The nodes of one worker that spans several: those that follow join the one that leads, and each learns of the others' end."""
