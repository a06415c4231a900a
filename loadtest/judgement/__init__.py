"""From records to conclusions: statistics, gates, the search for a rate, comparison, and the tool's own health."""
