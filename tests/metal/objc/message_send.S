// objc_msgSend for the simulated runtime: look the method up, then jump to it with every argument register
// and the stack as the caller left them. flashattn_simulated_lookup(receiver, selector) finds the method
// and aborts when there is none. A message to nil returns zero. x86-64 (System V) and aarch64 (AAPCS64).
        .text

#if defined(__x86_64__)

// Saves the argument registers, looks up (receiver, selector) and jumps to the method.
.macro LOOK_UP_AND_JUMP receiver selector
        pushq   %rbp
        .cfi_def_cfa_offset 16
        .cfi_offset %rbp, -16
        movq    %rsp, %rbp
        .cfi_def_cfa_register %rbp
        subq    $192, %rsp
        movq    %rdi, -8(%rbp)
        movq    %rsi, -16(%rbp)
        movq    %rdx, -24(%rbp)
        movq    %rcx, -32(%rbp)
        movq    %r8, -40(%rbp)
        movq    %r9, -48(%rbp)
        movq    %rax, -56(%rbp)         // number of vector registers of a variadic call
        movups  %xmm0, -80(%rbp)
        movups  %xmm1, -96(%rbp)
        movups  %xmm2, -112(%rbp)
        movups  %xmm3, -128(%rbp)
        movups  %xmm4, -144(%rbp)
        movups  %xmm5, -160(%rbp)
        movups  %xmm6, -176(%rbp)
        movups  %xmm7, -192(%rbp)
        movq    \receiver, %rax
        movq    \selector, %rsi
        movq    %rax, %rdi
        call    flashattn_simulated_lookup@PLT
        movq    %rax, %r11
        movq    -8(%rbp), %rdi
        movq    -16(%rbp), %rsi
        movq    -24(%rbp), %rdx
        movq    -32(%rbp), %rcx
        movq    -40(%rbp), %r8
        movq    -48(%rbp), %r9
        movq    -56(%rbp), %rax
        movups  -80(%rbp), %xmm0
        movups  -96(%rbp), %xmm1
        movups  -112(%rbp), %xmm2
        movups  -128(%rbp), %xmm3
        movups  -144(%rbp), %xmm4
        movups  -160(%rbp), %xmm5
        movups  -176(%rbp), %xmm6
        movups  -192(%rbp), %xmm7
        leave
        .cfi_def_cfa %rsp, 8
        jmp     *%r11
.endm

        .globl  objc_msgSend
        .globl  objc_msgSend_fpret
        .type   objc_msgSend, @function
        .type   objc_msgSend_fpret, @function
objc_msgSend:
objc_msgSend_fpret:
        .cfi_startproc
        testq   %rdi, %rdi
        je      1f
        LOOK_UP_AND_JUMP %rdi %rsi
1:      .cfi_def_cfa %rsp, 8
        xorl    %eax, %eax
        xorl    %edx, %edx
        xorps   %xmm0, %xmm0
        xorps   %xmm1, %xmm1
        ret
        .cfi_endproc
        .size   objc_msgSend, .-objc_msgSend

// The method returns a struct through the hidden pointer in rdi, so receiver and selector move up by one.
        .globl  objc_msgSend_stret
        .type   objc_msgSend_stret, @function
objc_msgSend_stret:
        .cfi_startproc
        testq   %rsi, %rsi
        je      2f
        LOOK_UP_AND_JUMP %rsi %rdx
2:      .cfi_def_cfa %rsp, 8
        movq    %rdi, %rax
        ret
        .cfi_endproc
        .size   objc_msgSend_stret, .-objc_msgSend_stret

#elif defined(__aarch64__)

// x8 carries the address of a returned struct, so one entry point serves all three names.
        .globl  objc_msgSend
        .globl  objc_msgSend_fpret
        .globl  objc_msgSend_stret
        .type   objc_msgSend, @function
        .type   objc_msgSend_fpret, @function
        .type   objc_msgSend_stret, @function
objc_msgSend:
objc_msgSend_fpret:
objc_msgSend_stret:
        .cfi_startproc
        cbz     x0, 1f
        stp     x29, x30, [sp, #-224]!
        .cfi_def_cfa_offset 224
        .cfi_offset 29, -224
        .cfi_offset 30, -216
        mov     x29, sp
        stp     x0, x1, [sp, #16]
        stp     x2, x3, [sp, #32]
        stp     x4, x5, [sp, #48]
        stp     x6, x7, [sp, #64]
        str     x8, [sp, #80]
        stp     q0, q1, [sp, #96]
        stp     q2, q3, [sp, #128]
        stp     q4, q5, [sp, #160]
        stp     q6, q7, [sp, #192]
        bl      flashattn_simulated_lookup
        mov     x16, x0
        ldp     x0, x1, [sp, #16]
        ldp     x2, x3, [sp, #32]
        ldp     x4, x5, [sp, #48]
        ldp     x6, x7, [sp, #64]
        ldr     x8, [sp, #80]
        ldp     q0, q1, [sp, #96]
        ldp     q2, q3, [sp, #128]
        ldp     q4, q5, [sp, #160]
        ldp     q6, q7, [sp, #192]
        ldp     x29, x30, [sp], #224
        .cfi_restore 29
        .cfi_restore 30
        .cfi_def_cfa_offset 0
        br      x16
1:      mov     x0, #0
        mov     x1, #0
        movi    d0, #0
        movi    d1, #0
        ret
        .cfi_endproc
        .size   objc_msgSend, .-objc_msgSend

#else
#error "the simulated runtime has no objc_msgSend for this processor"
#endif

        .section .note.GNU-stack, "", @progbits
