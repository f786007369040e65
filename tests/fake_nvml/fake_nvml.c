/* A libnvidia-ml.so.1 that does what a text file says: the probe's tests load it through the real ctypes path.
 *
 * FAKE_NVML_STATE   file of "KEY VALUE" lines, read again whenever it changes:
 *     count 8                    how many GPUs
 *     3.temperature 71           a value of GPU 3; *.temperature is that of all others
 *     3.lost 1                   everything of GPU 3 returns GPU_IS_LOST
 *     ret.FUNCTION 999           FUNCTION returns that code; 3.ret.FUNCTION for GPU 3 only
 *     hang.FUNCTION -1           FUNCTION never returns; 500: it takes half a second more; 3.hang.FUNCTION likewise
 *     burn.FUNCTION 5            FUNCTION takes 5 ms of CPU
 *     3.field.163.4 12           NVML field 163 of scope 4; 3.field.163 of all scopes; field_type.163 sets its type
 *     no_field.163 1             no GPU has that field; 3.field_ret.163.4 999: that one returns that code
 *     poll_ms 50                 how often a wait for events looks for some (a real driver wakes it)
 *     storm.per_s 100000         so many Xid events a second, of GPU storm.gpu, with the code storm.xid
 * FAKE_NVML_EVENTS  file to which "GPU TYPE DATA [GPU-INSTANCE]" lines are appended: one event each
 * FAKE_NVML_COUNTS  file of 64-byte records (name, 8 bytes of calls), kept up to date with every call
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7, TIMEOUT = 10,
       LOST = 15, OTHER_VERSION = 25, GPUS = 64, KEYS = 4096, RECORDS = 256 };

typedef int ret;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef struct { u32 index; } gpu;
typedef gpu *dev;

static gpu gpus[GPUS];
static int users;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* The state file. */

static struct { char key[96], value[160]; } state[KEYS];
static int keys, state_version;
static struct stat read_last;

static void read_state(void) {
  const char *path = getenv("FAKE_NVML_STATE");
  struct stat now;
  if (!path || stat(path, &now)) return;
  if (keys && now.st_ino == read_last.st_ino && now.st_size == read_last.st_size &&
      now.st_mtim.tv_nsec == read_last.st_mtim.tv_nsec && now.st_mtim.tv_sec == read_last.st_mtim.tv_sec) return;
  FILE *file = fopen(path, "r");
  if (!file) return;
  char line[320];
  for (keys = 0; keys < KEYS && fgets(line, sizeof line, file);)
    if (sscanf(line, "%95s %159[^\n]", state[keys].key, state[keys].value) == 2) keys++;
  fclose(file);
  read_last = now;
  state_version++;
}

static const char *get(const char *key) {
  for (int i = 0; i < keys; i++) if (!strcmp(state[i].key, key)) return state[i].value;
  return 0;
}

/* A key of GPU `d`: its own, else that of all; without a GPU the key as it is. */
static const char *text(dev d, const char *key, const char *otherwise) {
  char full[128];
  const char *found = 0;
  pthread_mutex_lock(&lock);
  read_state();
  if (d) { snprintf(full, sizeof full, "%u.%s", d->index, key); found = get(full); }
  if (d && !found) { snprintf(full, sizeof full, "*.%s", key); found = get(full); }
  if (!d) found = get(key);
  pthread_mutex_unlock(&lock);
  return found ? found : otherwise;
}

static long long num(dev d, const char *key, long long otherwise) {
  const char *found = text(d, key, 0);
  return found ? strtoll(found, 0, 0) : otherwise;
}

/* Calls are counted in a shared file, so that a test can read the counts of a child that hangs. */

static struct { char name[56]; uint64_t calls; } *records;

static void counted(const char *name) {
  const char *path = getenv("FAKE_NVML_COUNTS");
  pthread_mutex_lock(&lock);
  if (!records && path) {
    int file = open(path, O_RDWR | O_CREAT, 0600);
    if (file >= 0 && !ftruncate(file, RECORDS * 64)) {
      records = mmap(0, RECORDS * 64, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
      if (records == MAP_FAILED) records = 0;
    }
    if (file >= 0) close(file);
  }
  for (int i = 0; records && i < RECORDS; i++) {
    if (!records[i].name[0]) strncpy(records[i].name, name, 55);
    if (!strcmp(records[i].name, name)) { records[i].calls++; break; }
  }
  pthread_mutex_unlock(&lock);
}

static void rest_ms(long long ms) {
  struct timespec t = { ms / 1000, ms % 1000 * 1000000 };
  nanosleep(&t, 0);
}

static double on_clock_s(clockid_t id) { struct timespec t; clock_gettime(id, &t); return t.tv_sec + t.tv_nsec / 1e9; }
static double clock_s(void) { return on_clock_s(CLOCK_MONOTONIC); }
static double cpu_s(void) { return on_clock_s(CLOCK_THREAD_CPUTIME_ID); }

static ret before(const char *name, dev d) {
  char key[96];
  counted(name);
  snprintf(key, sizeof key, "hang.%s", name);
  long long hang = num(0, key, 0);
  if (!hang && d) hang = num(d, key, 0);
  if (hang < 0) for (;;) pause();
  if (hang > 0) rest_ms(hang);
  snprintf(key, sizeof key, "burn.%s", name);
  double end = cpu_s() + num(0, key, 0) / 1e3;
  while (cpu_s() < end) {}
  snprintf(key, sizeof key, "ret.%s", name);
  long long code = num(0, key, 0);
  if (!code && d) code = num(d, key, 0);
  if (code) return (ret)code;
  if (!users) return UNINITIALIZED;
  return d && num(d, "lost", 0) ? LOST : OK;
}

#define BEGIN(d) do { ret code_ = before(__func__, d); if (code_) return code_; } while (0)

/* One line for each function that fills in one number. */
#define NUMBER(function, type, key, otherwise) \
  ret function(dev d, type *value) { BEGIN(d); *value = (type)num(d, key, otherwise); return OK; }
#define NUMBER_OF(function, type, format, otherwise) \
  ret function(dev d, u32 which, type *value) { \
    char key[64]; BEGIN(d); snprintf(key, sizeof key, format, which); \
    const char *found = text(d, key, 0); \
    if (!found && (otherwise) < 0) return NOT_SUPPORTED; \
    *value = found ? (type)strtoll(found, 0, 0) : (type)(otherwise); return OK; }
#define TEXT(function, key, otherwise) \
  ret function(dev d, char *value, u32 length) { BEGIN(d); snprintf(value, length, "%s", text(d, key, otherwise)); return OK; }

/* The library. */

ret nvmlInitWithFlags(u32 flags) {
  (void)flags;
  for (u32 i = 0; i < GPUS; i++) gpus[i].index = i;
  users++;
  ret code = before(__func__, 0);
  if (code) users--;
  return code;
}
ret nvmlShutdown(void) { BEGIN(0); users--; return OK; }
const char *nvmlErrorString(ret code) { (void)code; return "an error of the fake"; }
ret nvmlSystemGetDriverVersion(char *v, u32 n) { BEGIN(0); snprintf(v, n, "%s", text(0, "driver", "580.65.06")); return OK; }

static u32 known(void) { long long n = num(0, "count", 8); return n < 0 ? 0 : n > GPUS ? GPUS : (u32)n; }

ret nvmlDeviceGetCount_v2(u32 *n) { BEGIN(0); *n = known(); return OK; }
ret nvmlDeviceGetHandleByIndex_v2(u32 i, dev *d) {
  BEGIN(i < known() ? &gpus[i] : 0);
  if (i >= known()) return INVALID;
  *d = &gpus[i];
  return OK;
}
static u32 bus_of(u32 i) { return (u32)num(&gpus[i], "bus", 0x10 + i); }
ret nvmlDeviceGetHandleByPciBusId_v2(const char *id, dev *d) {
  u32 domain, bus, device;
  if (sscanf(id, "%x:%x:%x", &domain, &bus, &device) != 3) return INVALID;
  for (u32 i = 0; i < known(); i++) if (bus_of(i) == bus) { BEGIN(&gpus[i]); *d = &gpus[i]; return OK; }
  BEGIN(0);
  return NOT_FOUND;
}
typedef struct { char legacy[16]; u32 domain, bus, device, id, subsystem; char bus_id[32]; } pci_info;
ret nvmlDeviceGetPciInfo_v3(dev d, pci_info *p) {
  BEGIN(d);
  memset(p, 0, sizeof *p);
  p->domain = (u32)num(d, "domain", 0);
  p->bus = bus_of(d->index);
  p->id = 0x233010de;
  snprintf(p->bus_id, sizeof p->bus_id, "%08X:%02X:00.0", p->domain, p->bus);
  return OK;
}
ret nvmlDeviceGetUUID(dev d, char *v, u32 n) {
  char own[64];
  BEGIN(d);
  snprintf(own, sizeof own, "GPU-00000000-0000-0000-0000-%012u", d->index);
  snprintf(v, n, "%s", text(d, "uuid", own));
  return OK;
}
TEXT(nvmlDeviceGetName, "name", "NVIDIA H100 80GB HBM3")
TEXT(nvmlDeviceGetVbiosVersion, "vbios", "96.00.89.00.01")
TEXT(nvmlDeviceGetInforomImageVersion, "inforom", "G520.0200.00.05")
ret nvmlDeviceGetGspFirmwareVersion(dev d, char *v) { BEGIN(d); snprintf(v, 64, "%s", text(d, "gsp", "580.65.06")); return OK; }
ret nvmlDeviceValidateInforom(dev d) { BEGIN(d); return OK; }

/* Heat, power, clocks. */

NUMBER_OF(nvmlDeviceGetTemperature, u32, "temperature%.0u", 45)
typedef struct { u32 version, sensor; int temperature; } temperature;
ret nvmlDeviceGetTemperatureV(dev d, temperature *t) { BEGIN(d); t->temperature = (int)num(d, "temperature", 45); return OK; }
typedef struct { u32 version; int margin; } margin_info;
ret nvmlDeviceGetMarginTemperature(dev d, margin_info *m) { BEGIN(d); m->margin = (int)num(d, "margin", 40); return OK; }
static const int thresholds[] = { 92, 89, 95, 87 };
ret nvmlDeviceGetTemperatureThreshold(dev d, u32 which, u32 *v) {
  char key[32];
  BEGIN(d);
  if (which > 3) return NOT_SUPPORTED;
  snprintf(key, sizeof key, "threshold.%u", which);
  *v = (u32)num(d, key, thresholds[which]);
  return OK;
}
NUMBER(nvmlDeviceGetPowerUsage, u32, "power_mw", 350000)
NUMBER(nvmlDeviceGetEnforcedPowerLimit, u32, "power_limit_mw", 700000)
NUMBER_OF(nvmlDeviceGetClockInfo, u32, "clock.%u", 1755)
NUMBER_OF(nvmlDeviceGetApplicationsClock, u32, "application_clock.%u", 1980)
NUMBER_OF(nvmlDeviceGetDefaultApplicationsClock, u32, "default_clock.%u", 1980)
NUMBER(nvmlDeviceGetCurrentClocksEventReasons, u64, "reasons", 0)
NUMBER(nvmlDeviceGetCurrentClocksThrottleReasons, u64, "reasons", 0)
ret nvmlDeviceGetUtilizationRates(dev d, u32 *v) {
  BEGIN(d);
  v[0] = (u32)num(d, "utilization", 97);
  v[1] = (u32)num(d, "memory_utilization", 60);
  return OK;
}

/* Memory and its errors. */

typedef struct { u32 version; u64 total, reserved, free, used; } memory_v2;
ret nvmlDeviceGetMemoryInfo_v2(dev d, memory_v2 *m) {
  BEGIN(d);
  m->total = 85520809984ULL;
  m->reserved = 600ULL << 20;
  m->used = (u64)num(d, "memory_used", 60000000000LL);
  m->free = m->total - m->reserved - m->used;
  return OK;
}
ret nvmlDeviceGetTotalEccErrors(dev d, u32 kind, u32 counter, u64 *v) {
  char key[32];
  BEGIN(d);
  snprintf(key, sizeof key, "ecc.%s.%s", kind ? "uncorrected" : "corrected", counter ? "aggregate" : "volatile");
  *v = (u64)num(d, key, 0);
  return OK;
}
ret nvmlDeviceGetMemoryErrorCounter(dev d, u32 kind, u32 counter, u32 where, u64 *v) {
  char key[48];
  BEGIN(d);
  snprintf(key, sizeof key, "ecc.%s.%s.%u", kind ? "uncorrected" : "corrected", counter ? "aggregate" : "volatile", where);
  *v = (u64)num(d, key, 0);
  return OK;
}
ret nvmlDeviceGetRemappedRows(dev d, u32 *corrected, u32 *uncorrected, u32 *pending, u32 *failed) {
  BEGIN(d);
  *corrected = (u32)num(d, "remap.corrected", 0);
  *uncorrected = (u32)num(d, "remap.uncorrected", 0);
  *pending = (u32)num(d, "remap.pending", 0);
  *failed = (u32)num(d, "remap.failed", 0);
  return OK;
}
ret nvmlDeviceGetRowRemapperHistogram(dev d, u32 *banks) {
  BEGIN(d);
  memset(banks, 0, 5 * sizeof *banks);
  banks[4] = (u32)num(d, "remap.none", 0);
  banks[0] = 640 - banks[4];
  return OK;
}
typedef struct { u32 version; u64 counts[11]; u32 exceeded; } sram_status;
ret nvmlDeviceGetSramEccErrorStatus(dev d, sram_status *s) { BEGIN(d); s->exceeded = (u32)num(d, "sram_exceeded", 0); return OK; }
ret nvmlDeviceGetEccMode(dev d, u32 *now, u32 *next) { BEGIN(d); *now = (u32)num(d, "ecc_mode", 1); *next = (u32)num(d, "ecc_pending", 1); return OK; }
ret nvmlDeviceGetDefaultEccMode(dev d, u32 *mode) { BEGIN(d); *mode = (u32)num(d, "ecc_default", 1); return OK; }
typedef struct { u32 version, value; } addressing;
ret nvmlDeviceGetAddressingMode(dev d, addressing *a) { BEGIN(d); a->value = (u32)num(d, "addressing", 0); return OK; }

/* Links. */

NUMBER(nvmlDeviceGetCurrPcieLinkWidth, u32, "pcie_width", 16)
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, u32, "pcie_width_max", 16)
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, u32, "pcie_generation", 5)
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, u32, "pcie_generation_max", 5)
ret nvmlDeviceGetNvLinkState(dev d, u32 link, u32 *active) {
  char key[32];
  BEGIN(d);
  if (num(d, "links", 18) == 0) return NOT_SUPPORTED;
  if (link >= (u32)num(d, "links", 18)) return INVALID;
  snprintf(key, sizeof key, "link.%u", link);
  *active = (u32)num(d, key, 1);
  return OK;
}
ret nvmlDeviceGetP2PStatus(dev a, dev b, u32 index, u32 *status) {
  char key[32];
  (void)index;
  BEGIN(a);
  snprintf(key, sizeof key, "p2p.%u", b->index);
  *status = (u32)num(a, key, 0);
  return OK;
}
typedef struct { u32 version; unsigned char cluster[16]; ret status; u32 clique, state, health; unsigned char summary; } fabric_info;
ret nvmlDeviceGetGpuFabricInfoV(dev d, fabric_info *f) {
  BEGIN(d);
  if (f->version >> 24 > (u32)num(d, "fabric.version", 3)) return OTHER_VERSION;
  f->state = (u32)num(d, "fabric.state", 3);
  f->status = (ret)num(d, "fabric.status", 0);
  f->health = (u32)num(d, "fabric.health", 0x1AA);
  return OK;
}
typedef struct { u32 id, scope; int64_t at, took; u32 type; ret code; union { u64 u; int64_t s; int i; double d; } value; } field;
ret nvmlDeviceGetFieldValues(dev d, int n, field *f) {
  BEGIN(d);
  for (int i = 0; i < n; i++) {
    char key[48];
    const char *found;
    snprintf(key, sizeof key, "field.%u.%u", f[i].id, f[i].scope);
    if (!(found = text(d, key, 0))) { snprintf(key, sizeof key, "field.%u", f[i].id); found = text(d, key, 0); }
    if (!found && (f[i].id == 230 || f[i].id == 94 || (f[i].id >= 161 && f[i].id <= 163))) found = "0";
    if (!found && f[i].id == 82) found = "52";
    if (!found && f[i].id == 194) found = "-2";
    snprintf(key, sizeof key, "no_field.%u", f[i].id);
    if (num(0, key, 0)) found = 0;
    snprintf(key, sizeof key, "field_ret.%u.%u", f[i].id, f[i].scope);
    f[i].code = found ? (ret)num(d, key, OK) : NOT_SUPPORTED;
    snprintf(key, sizeof key, "field_type.%u", f[i].id);
    f[i].type = (u32)num(0, key, f[i].id == 194 ? 5 : 3);
    f[i].value.s = found ? strtoll(found, 0, 0) : 0;
  }
  return OK;
}

/* Modes and processes. */

NUMBER(nvmlDeviceGetPersistenceMode, u32, "persistence", 1)
NUMBER(nvmlDeviceGetComputeMode, u32, "compute_mode", 0)
ret nvmlDeviceGetMigMode(dev d, u32 *now, u32 *next) { BEGIN(d); *now = (u32)num(d, "mig", 0); *next = (u32)num(d, "mig_pending", 0); return OK; }

typedef struct { u32 pid; u64 memory; u32 gpu_instance, compute_instance; } process;
/* "PID MIB, PID MIB, ..." */
static ret processes(dev d, const char *key, u32 *n, process *list) {
  char all[160], *rest = all, *one;
  u32 there = 0;
  snprintf(all, sizeof all, "%s", text(d, key, ""));
  while ((one = strsep(&rest, ",")))  {
    u64 pid, mib;
    if (sscanf(one, "%llu %llu", &pid, &mib) != 2) continue;
    if (list && there < *n) list[there] = (process){ (u32)pid, mib << 20, 0xFFFFFFFF, 0xFFFFFFFF };
    there++;
  }
  u32 room = list ? *n : 0;
  *n = there;
  return there > room ? TOO_SMALL : OK;
}
ret nvmlDeviceGetComputeRunningProcesses_v3(dev d, u32 *n, process *list) { BEGIN(d); return processes(d, "processes", n, list); }
ret nvmlDeviceGetGraphicsRunningProcesses_v3(dev d, u32 *n, process *list) { BEGIN(d); return processes(d, "graphics", n, list); }

/* Events. */

typedef struct { u64 wanted[GPUS]; long at; double next; } set;
typedef struct { dev device; u64 type, data; u32 gpu_instance, compute_instance; } event;

ret nvmlEventSetCreate(set **s) {
  struct stat now;
  const char *path = getenv("FAKE_NVML_EVENTS");
  BEGIN(0);
  *s = calloc(1, sizeof **s);
  if (path && !stat(path, &now)) (*s)->at = now.st_size;
  return OK;
}
ret nvmlEventSetFree(set *s) { BEGIN(0); free(s); return OK; }
NUMBER(nvmlDeviceGetSupportedEventTypes, u64, "event_types", 0xB)
ret nvmlDeviceRegisterEvents(dev d, u64 types, set *s) { BEGIN(d); s->wanted[d->index] |= types; return OK; }

static int storm(set *s, event *e, double per_s) {
  double now = clock_s();
  u32 index = (u32)num(0, "storm.gpu", 0);
  if (per_s <= 0 || index >= GPUS || now < s->next) return 0;
  s->next = (s->next > now - 0.01 ? s->next : now) + 1 / per_s;
  *e = (event){ &gpus[index], 8, (u64)num(0, "storm.xid", 13), 0xFFFFFFFF, 0xFFFFFFFF };
  return 1;
}

static int appended(set *s, event *e) {
  const char *path = getenv("FAKE_NVML_EVENTS");
  struct stat now;
  char line[128];
  int found = 0;
  if (!path || stat(path, &now) || now.st_size <= s->at) return 0;
  FILE *file = fopen(path, "r");
  if (!file) return 0;
  fseek(file, s->at, SEEK_SET);
  while (!found && fgets(line, sizeof line, file) && strchr(line, '\n')) {
    u32 index, instance = 0xFFFFFFFF;
    u64 type, data;
    s->at = ftell(file);
    if (sscanf(line, "%u %llu %llu %u", &index, &type, &data, &instance) < 3 || index >= GPUS) continue;
    if (!(s->wanted[index] & type)) continue;
    *e = (event){ &gpus[index], type, data, instance, 0xFFFFFFFF };
    found = 1;
  }
  fclose(file);
  return found;
}

ret nvmlEventSetWait_v2(set *s, event *e, u32 ms) {
  BEGIN(0);
  int version = -1; /* of the state when it was last asked for losses and storms: waiting must cost next to nothing */
  double per_s = 0;
  long long poll_ms = num(0, "poll_ms", 50);
  for (double end = clock_s() + ms / 1e3; clock_s() < end; rest_ms(per_s > 0 ? 1 : poll_ms)) {
    text(0, "", 0);
    if (version != state_version) {
      version = state_version;
      per_s = (double)num(0, "storm.per_s", 0);
      for (u32 i = 0; i < GPUS; i++) if (s->wanted[i] && num(&gpus[i], "lost", 0)) return LOST;
    }
    if (storm(s, e, per_s) || appended(s, e)) return OK;
  }
  return TIMEOUT;
}
