"""What servers speak: one file for each shape of request and streamed answer."""
