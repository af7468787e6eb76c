/* A stub of the NVIDIA driver's library, for tests: answers come from the file that
 * NVML_SCENARIO names, read at every call. Its lines:
 *
 *   power=300000          a figure of every card, in the library's own unit
 *   1.power=250000        of card 1 only
 *   energy_step=500000    what a counter rises by at every call
 *   fail.power=3          the question always fails with this code
 *   fail.power.2=10       only its second call fails
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned int uint;
typedef unsigned long long ull;
typedef struct { char name[48]; int calls; } Count;
static Count counts[256];

static char *find(const char *key) {
    static char line[256];
    FILE *file = fopen(getenv("NVML_SCENARIO"), "r");
    size_t n = strlen(key);
    while (file && fgets(line, sizeof line, file))
        if (!strncmp(line, key, n) && line[n] == '=') {
            line[strcspn(line, "\n")] = 0;
            fclose(file);
            return line + n + 1;
        }
    if (file) fclose(file);
    return NULL;
}

static char *text(void *device, const char *key) {
    char own[64];
    snprintf(own, sizeof own, "%d.%s", (int)(size_t)device - 1, key);
    char *found = find(own);
    return found ? found : find(key);
}

static ull number(void *device, const char *key, ull otherwise) {
    char *found = text(device, key);
    return found ? strtoull(found, NULL, 0) : otherwise;
}

static int calls(void *device, const char *key) {
    char own[48];
    snprintf(own, sizeof own, "%d.%s", (int)(size_t)device - 1, key);
    for (int i = 0; i < 256; i++) {
        if (!counts[i].name[0]) strcpy(counts[i].name, own);
        if (!strcmp(counts[i].name, own)) return ++counts[i].calls;
    }
    return 0;
}

/* The error code of this call, 0 if it succeeds. */
static int failure(void *device, const char *key) {
    char always[64], once[80];
    snprintf(always, sizeof always, "fail.%s", key);
    snprintf(once, sizeof once, "%s.%d", always, calls(device, key));
    int code = (int)number(device, always, 0);
    return code ? code : (int)number(device, once, 0);
}

static int give(void *device, const char *key, uint *value) {
    int code = failure(device, key);
    *value = (uint)number(device, key, 0);
    return code;
}

static int give_text(void *device, const char *key, char *buffer, uint size) {
    char *found = text(device, key);
    snprintf(buffer, size, "%s", found ? found : "SIMULATED");
    return failure(device, key);
}

static ull counter(void *device, const char *key) {
    char step[48], ticks[48];
    snprintf(step, sizeof step, "%s_step", key);
    snprintf(ticks, sizeof ticks, "%s_ticks", key);
    return number(device, key, 0) + number(device, step, 0) * (ull)calls(device, ticks);
}

int nvmlInitWithFlags(uint flags) { return failure(NULL, "init"); }
int nvmlShutdown(void) { return failure(NULL, "shutdown"); }
const char *nvmlErrorString(int code) { return "stub error"; }
int nvmlDeviceGetCount_v2(uint *n) { *n = (uint)number(NULL, "count", 1); return failure(NULL, "count"); }
int nvmlDeviceGetHandleByIndex_v2(uint i, void **d) { *d = (void *)(size_t)(i + 1); return failure(*d, "handle"); }
int nvmlDeviceGetName(void *d, char *b, uint n) { return give_text(d, "name", b, n); }
int nvmlSystemGetDriverVersion(char *b, uint n) { return give_text(NULL, "driver", b, n); }
int nvmlDeviceGetUUID(void *d, char *b, uint n) { return give_text(d, "uuid", b, n); }
int nvmlDeviceGetMigMode(void *d, uint *now, uint *next) { *next = 0; return give(d, "mig", now); }
/* Instances of card 0 answer as cards 8 and 9. */
int nvmlDeviceGetMaxMigDeviceCount(void *d, uint *n) { *n = 4; return 0; }
int nvmlDeviceGetMigDeviceHandleByIndex(void *d, uint i, void **one) {
    *one = (void *)(size_t)(i + 8);
    return i == 1 || i == 2 ? 0 : 6;
}
int nvmlDeviceGetPowerUsage(void *d, uint *v) { return give(d, "power", v); }
int nvmlDeviceGetEnforcedPowerLimit(void *d, uint *v) { return give(d, "power_limit", v); }
int nvmlDeviceGetTemperature(void *d, uint sensor, uint *v) { return give(d, "temperature", v); }
int nvmlDeviceGetPcieThroughput(void *d, uint way, uint *v) { return give(d, way ? "pcie_rx" : "pcie_tx", v); }
int nvmlDeviceGetClockInfo(void *d, uint kind, uint *v) { return give(d, kind == 1 ? "sm_clock" : "memory_clock", v); }
int nvmlDeviceGetTemperatureThreshold(void *d, uint which, uint *v) {
    char key[32];
    snprintf(key, sizeof key, "limit.%u", which);
    return give(d, key, v);
}
int nvmlDeviceGetCudaComputeCapability(void *d, int *major, int *minor) {
    *major = (int)number(d, "cc", 90) / 10;
    *minor = (int)number(d, "cc", 90) % 10;
    return failure(d, "cc");
}
int nvmlDeviceGetMemoryInfo(void *d, ull *total_free_used) {
    total_free_used[0] = number(d, "memory_total", 0);
    total_free_used[2] = number(d, "memory_used", 0);
    total_free_used[1] = total_free_used[0] - total_free_used[2];
    return failure(d, "memory");
}
int nvmlDeviceGetUtilizationRates(void *d, uint *gpu_memory) {
    gpu_memory[0] = (uint)number(d, "utilization", 0);
    return failure(d, "utilization");
}
int nvmlDeviceGetTotalEnergyConsumption(void *d, ull *v) {
    int code = failure(d, "energy");
    *v = counter(d, "energy");
    return code;
}
int nvmlDeviceGetCurrentClocksEventReasons(void *d, ull *v) {
    *v = number(d, "reasons", 0);
    return failure(d, "reasons");
}
typedef struct { uint pid; ull used; uint gpu, compute; } Process;
static int processes(void *d, const char *key, uint *n, Process *p) {
    char bytes[48];
    uint pid = (uint)number(d, key, 0);
    if (failure(d, key)) return 3;
    snprintf(bytes, sizeof bytes, "%s_bytes", key);
    if (!pid) return *n = 0;
    *n = 1;
    if (!p) return 7; /* insufficient size: call again with room for one */
    p->pid = pid;
    p->used = number(d, bytes, 0);
    return 0;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *d, uint *n, Process *p) { return processes(d, "compute", n, p); }
int nvmlDeviceGetGraphicsRunningProcesses_v3(void *d, uint *n, Process *p) { return processes(d, "graphics", n, p); }

typedef struct { uint id; int code; double value; const char *names[3]; } Metric;
typedef struct { uint version, n; void *first, *second; Metric metrics[]; } Request;
int nvmlGpmQueryDeviceSupport(void *d, uint *version_supported) {
    version_supported[1] = (uint)number(d, "gpm", 0);
    return failure(d, "gpm");
}
int nvmlGpmSampleAlloc(void **sample) { *sample = malloc(1); return 0; }
int nvmlGpmSampleFree(void *sample) { free(sample); return 0; }
int nvmlGpmSampleGet(void *d, void *sample) { return failure(d, "gpm_sample"); }
int nvmlGpmMetricsGet(Request *request) {
    for (uint i = 0; i < request->n; i++) {
        char key[32], code[40];
        snprintf(key, sizeof key, "gpm.%u", request->metrics[i].id);
        snprintf(code, sizeof code, "%s.code", key);
        request->metrics[i].code = (int)number(NULL, code, 0);
        request->metrics[i].value = (double)number(NULL, key, 0);
    }
    return failure(NULL, "gpm_metrics");
}
