// Excerpts of what a search finds are fetched, which a page opened from a disk may not do.
if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;
