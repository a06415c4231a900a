/* libnvidia-ml.so.1, as far as nvidia-ml-py is used by the product. A GPU's id is that of cuDeviceGetUuid,
   behind GPU-, or behind MIG- where it is a part of one; and a part has memory, but no utilisation. */
#define _GNU_SOURCE
#include "control.h"
#include <stdlib.h>
#include <string.h>

enum { NOT_INITIALISED = 1, NOT_SUPPORTED = 3, NO_SUCH_GPU = 6, GPU_IS_LOST = 15 };
static int initialised;
struct utilisation { unsigned gpu, memory; };
struct memory { unsigned long long total, free, used; };

int nvmlInitWithFlags(unsigned flags) { NOTE(0); initialised = 1; return OK; }
int nvmlShutdown(void) { NOTE(0); initialised = 0; return OK; }
const char *nvmlErrorString(int error) { return error == GPU_IS_LOST ? "GPU is lost" : "a stub's error"; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    NOTE(0);
    if (!initialised) return NOT_INITIALISED;
    if (strlen(uuid) != 40) return NO_SUCH_GPU;
    long device = strtol(uuid + 38, NULL, 16);
    *handle = (void *)(device + 1);
    if (device >= device_count()) return NO_SUCH_GPU;
    return strncmp(uuid, is_part((int)device) ? "MIG-" : "GPU-", 4) ? NO_SUCH_GPU : OK;
}
static int gone(void *handle) { return control->lost == (long)handle ? GPU_IS_LOST : OK; }
int nvmlDeviceGetUtilizationRates(void *handle, struct utilisation *found) {
    NOTE(0);
    if (is_part((int)(long)handle - 1)) return NOT_SUPPORTED;
    *found = (struct utilisation){36 + (unsigned)(long)handle, 12};
    return gone(handle);
}
int nvmlDeviceGetMemoryInfo(void *handle, struct memory *found) {
    NOTE(0);
    unsigned long long used = control->device_bytes[(long)handle - 1];
    *found = (struct memory){total_bytes(), total_bytes() - used, used};
    return gone(handle);
}
