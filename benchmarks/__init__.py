"""Side by side with peers, in one interleaved run: ours, the peer, the ratio and the physical limit."""
