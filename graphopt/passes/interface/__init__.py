"""Phase ``interface``: what an app feeds and reads: ports of the graph are added, dropped or given another meaning."""
