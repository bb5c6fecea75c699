"""Speed against rivals: both sides in one process, taking turns, as ratios with their spread."""
