/* Bytes that torch asks from the C library, tensors and scratch memory of its kernels alike: preload this library.

   Blocks count that libc10 and libtorch_cpu ask for themselves, which contains oneDNN and MKL: not Python's objects, nor
   those of C++ (which `operator new` of libstdc++ asks for), nor buffers of other libraries. */
#define _GNU_SOURCE
#include <errno.h>
#include <link.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

#define SLOTS ((size_t)1 << 20)
static struct { void *at; size_t bytes; } table[SLOTS]; /* by address, with linear probing */
static struct { uintptr_t begin, bytes; } code[64];
static int codes;
static long live, peak;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int note_code(struct dl_phdr_info *library, size_t size, void *data) {
  if (!strstr(library->dlpi_name, "libtorch_cpu") && !strstr(library->dlpi_name, "libc10.so")) return 0;
  for (int i = 0; i < library->dlpi_phnum && codes < 64; i++) {
    const ElfW(Phdr) *part = &library->dlpi_phdr[i];
    if (part->p_type != PT_LOAD || !(part->p_flags & PF_X)) continue;
    code[codes].begin = library->dlpi_addr + part->p_vaddr;
    code[codes++].bytes = part->p_memsz;
  }
  return 0;
}

void below_torch_begin(void) { codes = 0; live = peak = 0; dl_iterate_phdr(note_code, NULL); }
void below_torch_reset_peak(void) { peak = live; }
long below_torch_live(void) { return live; }
long below_torch_peak(void) { return peak; }

static size_t slot_of(void *at) { return ((uintptr_t)at >> 4) * 11400714819323198485ull >> 44; }

static void *add(void *at, size_t bytes, void *caller) {
  int counts = 0;
  for (int i = 0; i < codes; i++) counts |= (uintptr_t)caller - code[i].begin < code[i].bytes;
  if (!at || !counts) return at;
  pthread_mutex_lock(&lock);
  size_t i = slot_of(at);
  while (table[i].at) i = (i + 1) & (SLOTS - 1);
  table[i].at = at;
  table[i].bytes = bytes;
  live += bytes;
  peak = live > peak ? live : peak;
  pthread_mutex_unlock(&lock);
  return at;
}

static void forget(void *at) {
  if (!at || !codes) return;
  pthread_mutex_lock(&lock);
  size_t i = slot_of(at);
  while (table[i].at && table[i].at != at) i = (i + 1) & (SLOTS - 1);
  if (table[i].at) {
    live -= table[i].bytes;
    for (size_t j = (i + 1) & (SLOTS - 1); table[j].at; j = (j + 1) & (SLOTS - 1))
      if (((j - slot_of(table[j].at)) & (SLOTS - 1)) >= ((j - i) & (SLOTS - 1))) { /* its probe passes the gap */
        table[i] = table[j];
        i = j;
      }
    table[i].at = NULL;
  }
  pthread_mutex_unlock(&lock);
}

#define CALLER __builtin_return_address(0)
void *malloc(size_t n) { return add(__libc_malloc(n), n, CALLER); }
void *calloc(size_t n, size_t size) { return add(__libc_calloc(n, size), n * size, CALLER); }
void *memalign(size_t to, size_t n) { return add(__libc_memalign(to, n), n, CALLER); }
void *aligned_alloc(size_t to, size_t n) { return add(__libc_memalign(to, n), n, CALLER); }
void free(void *at) {
  forget(at);
  __libc_free(at);
}
void *realloc(void *at, size_t n) {
  forget(at);
  return add(__libc_realloc(at, n), n, CALLER);
}
int posix_memalign(void **out, size_t to, size_t n) {
  void *at = __libc_memalign(to, n);
  if (!at) return ENOMEM;
  *out = add(at, n, CALLER);
  return 0;
}
