// The two Grand Central Dispatch types that metal-cpp names; the simulated device uses neither.
#pragma once

typedef struct dispatch_queue_s* dispatch_queue_t;
typedef struct dispatch_data_s* dispatch_data_t;
