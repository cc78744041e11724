"""What Headway costs, measured side by side in one run: `make bench`."""
