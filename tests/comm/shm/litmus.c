/* Litmus tests of the fence in src/paceline/shared_words.py, between two processes that share memory.

     litmus publish|sleep fenced|bare ROUNDS     prints how often a process saw what the fence forbids

   publish   One process stores data and then a word; the other loads the word and then the data.
   sleep     Each process stores its own word and then loads the other's, as do a rank before it sleeps and a rank that
             looks for sleepers. One of them must see the other's word.

   The fence is called as Python calls it: as a function of libatomic. */

#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define DEADLINE_S 90

typedef struct {
  _Alignas(128) _Atomic long value; /* on cache lines of its own */
} Word;

typedef struct {
  Word data, word;      /* publish */
  Word own[2], seen[2]; /* sleep, by process */
  Word round[2];        /* the processes begin a round together */
} Shared;

typedef long Test(Shared *shared, int process, long rounds, bool fenced);

static void (*volatile fence)(memory_order) = atomic_thread_fence;

static long load(Word *word) { return atomic_load_explicit(&word->value, memory_order_relaxed); }
static void store(Word *word, long value) { atomic_store_explicit(&word->value, value, memory_order_relaxed); }

static inline void order(bool fenced) {
  if (fenced)
    fence(memory_order_seq_cst);
  else
    atomic_signal_fence(memory_order_seq_cst); /* holds the compiler, not the core */
}

static void meet(Shared *shared, int process, long round) {
  atomic_store(&shared->round[process].value, round);
  for (long spins = 1; atomic_load(&shared->round[1 - process].value) < round; spins++)
    if (spins % 1000 == 0) sched_yield(); /* both may be on one core */
}

__attribute__((noinline)) static long publish(Shared *shared, int process, long rounds, bool fenced) {
  long wrong = 0;
  if (process == 0) {
    for (long i = 1; i <= rounds; i++) {
      store(&shared->data, i);
      order(fenced);
      store(&shared->word, i);
    }
    return 0;
  }
  for (long word = 0; word < rounds;) {
    word = load(&shared->word);
    order(fenced);
    wrong += load(&shared->data) < word;
  }
  return wrong;
}

__attribute__((noinline)) static long sleep_or_see(Shared *shared, int process, long rounds, bool fenced) {
  long wrong = 0;
  for (long i = 1; i <= rounds; i++) {
    meet(shared, process, 2 * i);
    store(&shared->own[process], i);
    order(fenced);
    store(&shared->seen[process], load(&shared->own[1 - process]));
    meet(shared, process, 2 * i + 1);
    wrong += load(&shared->seen[0]) < i && load(&shared->seen[1]) < i;
  }
  return wrong;
}

int main(int count, char **arguments) {
  if (count != 4) return 2;
  Test *test = !strcmp(arguments[1], "publish") ? publish : sleep_or_see;
  bool fenced = !strcmp(arguments[2], "fenced");
  long rounds = atol(arguments[3]);
  Shared *shared = mmap(NULL, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) return 3;
  pid_t child = fork();
  if (child < 0) return 4;
  alarm(DEADLINE_S);
  meet(shared, child == 0, 1);
  long wrong = test(shared, child == 0, rounds, fenced);
  if (child == 0) _exit(0);
  waitpid(child, NULL, 0);
  printf("%ld\n", wrong);
  return 0;
}
