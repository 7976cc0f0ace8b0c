/* A small NVML: two GPUs and a MIG slice, found by UUID alone. Free memory differs, so that mixing them up shows. */
#include <string.h>

typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { const char *uuid; Memory memory; } Device;

static const Device devices[] = {
    {"GPU-11111111-1111-1111-1111-111111111111", {80000, 1000, 79000}},
    {"GPU-22222222-2222-2222-2222-222222222222", {80000, 2000, 78000}},
    {"MIG-33333333-3333-3333-3333-333333333333", {10000, 3000, 7000}},
};

int nvmlInitWithFlags(unsigned flags) { (void)flags; return 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return code == 6 ? "Not Found" : "Unknown Error"; }

int nvmlDeviceGetHandleByUUID(const char *uuid, const Device **handle)
{
    for (unsigned i = 0; i < sizeof devices / sizeof *devices; i++)
        if (strcmp(devices[i].uuid, uuid) == 0) { *handle = &devices[i]; return 0; }
    return 6; /* NVML_ERROR_NOT_FOUND */
}

int nvmlDeviceGetTotalEnergyConsumption(const Device *handle, unsigned long long *millijoules)
{
    *millijoules = 5 * handle->memory.free;
    return handle->uuid[0] == 'M' ? 3 : 0; /* NVML_ERROR_NOT_SUPPORTED */
}

int nvmlDeviceGetMemoryInfo(const Device *handle, Memory *memory) { *memory = handle->memory; return 0; }
