/* Threads that share the items of one job. */
#pragma once

typedef void (*work)(const void *job, long item);

/* Calls do(job, item) for every item in 0 .. items - 1, each once, on up to `threads` threads, the caller's among them;
   returns when all are done. Who does which item is settled as they go, so results must not depend on it. */
void share(work do_item, const void *job, long items);
